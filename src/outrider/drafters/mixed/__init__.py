"""Several drafters together: in one tree, or one drafting for another."""
