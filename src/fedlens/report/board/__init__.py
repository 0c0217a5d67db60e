"""The board: a local web page over all run folders below one directory. See `app.py` for the
server, `report/page` for the page.
"""
