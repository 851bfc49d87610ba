"""Charts of runs: one page that needs nothing but a browser, and two pictures. Nothing here imports
torch."""
