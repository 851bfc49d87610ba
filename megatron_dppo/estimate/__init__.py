"""Memory, time and cost of a run, from the settings alone. Needs no torch and no model files."""
