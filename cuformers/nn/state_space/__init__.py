"""State-space layers: what Mamba and Mamba-2 have in the place of attention."""
