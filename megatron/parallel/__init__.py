"""Process groups, sharded layers, named random streams, the loss. All collectives are here."""
