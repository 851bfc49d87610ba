"""What is left out by chance, and with which probability: prompts before rollouts, completions after them."""
