"""Length tasks: generated examples whose length is drawn in training and chosen in evaluation."""
