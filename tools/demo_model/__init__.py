"""Scripts that write the corpus of the paceline demo models, train and measure them."""
