"""Do internal measures go with scores from outside? Measures of models joined with benchmark scores, what few models
support, and where a model stands among published ones."""
