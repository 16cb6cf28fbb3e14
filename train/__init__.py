"""CleanRL-style training scripts."""
