"""Pruning of completions in trainers of other projects. Each module imports the library that it is
named after."""
