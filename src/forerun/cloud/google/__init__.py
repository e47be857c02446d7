"""The parts that all Google providers share: credentials, HTTP requests with retries, operations and the cloud's clock."""
