"""Training that starts before its data is complete (`data.begin: early`): windows, the order, and the build."""
