"""The algorithm, free of Megatron, servers and process groups: NumPy throughout, and torch in
``losses`` alone."""
