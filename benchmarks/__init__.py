"""How fast it is, as ratios against what one would use otherwise. ``make bench`` runs all of it."""
