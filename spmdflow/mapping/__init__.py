"""Which models share which devices, and how each is cut: Algorithms 1 and 2 (paper section 6).

`machine` holds the rates of a kind of device, each with its source.
"""
