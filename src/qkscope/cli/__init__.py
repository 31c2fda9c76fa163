"""The command line: a thin shell over the other rooms. Only here does qkscope print."""
