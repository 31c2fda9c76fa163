"""The interactive page: tables packed into one HTML file that needs neither network nor library.

`arrays` turns tables into dense arrays, `errors` how sure they are, `lens_data` what lenses declare, `pack` into bytes,
`facts` says what was measured, `assemble` puts style, modules and data into one file. What the page does is in
`static/`.
"""
