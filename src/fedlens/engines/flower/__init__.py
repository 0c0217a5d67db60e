"""Flower: real sites. `engine` on the server, `client_app` and `site` at a site, `strategy` for an
app of the user's own.
"""
