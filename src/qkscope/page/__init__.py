"""The interactive page: tables packed into one HTML file that needs neither network nor library.

`arrays` packs tables as dense arrays, `errors` their standard errors, `lens_data` what lenses declare, `detail` what is
read when a head is opened; `about` states what was measured; `write` puts style, modules (`static/`) and data together.
"""
