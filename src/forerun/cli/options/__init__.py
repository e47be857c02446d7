"""The options of the commands, by topic, and the parser that reads them."""
