"""Rules that divide memory in systems of today, as controllers: what a trained policy is measured against."""
