"""Models as stochastic policies: sampling, log-probabilities and divergences of recorded steps."""
