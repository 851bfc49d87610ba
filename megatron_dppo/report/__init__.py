"""Charts of runs: a page for any browser, and two pictures. Does not import torch."""
