"""What a run will need, take and cost, from its settings alone. Needs no torch, and not the model's files."""
