"""Serving systems that the control loop can drive; `http` and `engine` hold one each, `scripted` is for tests."""
