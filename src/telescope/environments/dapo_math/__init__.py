"""Competition mathematics from DAPO-Math-17k, with whole numbers as answers."""
