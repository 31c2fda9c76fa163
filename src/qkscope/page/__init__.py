"""The interactive page: tables packed into one HTML file that needs neither network nor library.

`arrays` turns tables into dense arrays, `pack` into bytes, `facts` says what was measured, `markdown` takes cards
apart into blocks, `assemble` puts style, modules and data into one file. What the page does is in `static/`.
"""
