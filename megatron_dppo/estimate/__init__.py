"""Memory, time and cost of a run, from its settings alone. Needs no torch and no model files."""
