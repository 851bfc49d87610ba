"""Random pruning with known probabilities: of prompts before rollouts, of completions after them."""
