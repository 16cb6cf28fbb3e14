"""The suite: families of loads, all controllers, several draws; what is stored of it, and what it says."""
