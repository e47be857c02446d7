"""The protocol between supervisors and workers: messages, authentication and transport."""
