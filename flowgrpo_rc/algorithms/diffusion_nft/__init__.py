"""DiffusionNFT: learns from good and bad finished samples by flow matching, without log-probs."""
