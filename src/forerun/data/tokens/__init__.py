"""From rows to tokens: rendered, encoded by worker processes, and kept in a store that is never changed."""
