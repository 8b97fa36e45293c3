"""Competition mathematics (MATH, Hendrycks et al., 2021): the answer in a box, compared by math-verify."""
