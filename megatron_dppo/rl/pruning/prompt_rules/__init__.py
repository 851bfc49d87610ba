"""Rules for prompts, one to a module."""
