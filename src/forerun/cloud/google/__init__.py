"""The parts that all Google providers share: credentials, requests with retries, operations and the cloud's clock."""
