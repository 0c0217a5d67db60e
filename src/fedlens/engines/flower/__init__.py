"""Flower: real sites. `engine` on the server; at a site `fleet` (its network) and `site` (its
work); `records`, what both put into Flower's; `strategy` for an app of the user's own.
"""
