"""Competition mathematics from DeepScaleR, scored as the environment `hendrycks_math` scores."""
