"""Gymnasium environments and the serving model behind them."""
