"""Do internal measures go with scores from outside? Measures of models joined with benchmark scores, what few models
allow to be said, and where a model stands among published ones."""
