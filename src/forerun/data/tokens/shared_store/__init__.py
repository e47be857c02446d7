"""What a token store needs that many machines build and read: publication of units, shares of hosts, the index."""
