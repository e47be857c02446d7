"""The setup of a rented machine: startup script, wheel, locked requirements, units and the bundle of a job."""
