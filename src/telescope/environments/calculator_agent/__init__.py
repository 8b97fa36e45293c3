"""Calculator agent: work out an expression step by step with a calculator that takes one step at a time."""
