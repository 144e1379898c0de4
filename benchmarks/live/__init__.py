"""The live demonstration: an ad, a shop, three helpers and one noisy answer, on pages of this machine."""
