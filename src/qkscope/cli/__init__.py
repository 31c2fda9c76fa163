"""The command line: a thin shell over the pipeline. Only here does qkscope print."""
