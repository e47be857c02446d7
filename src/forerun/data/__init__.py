"""From files to batches: tokens, packed rows, and an order that is a pure function of seed and step."""
