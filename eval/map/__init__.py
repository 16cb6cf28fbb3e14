"""The map of where adapting pays: headroom over models, links, host tiers, histories, hot shares and loads."""
