"""Provide process groups, collectives, sharded layers, named random streams and the loss."""
