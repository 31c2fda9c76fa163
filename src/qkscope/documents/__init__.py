"""Documents in, token windows out: generators that hold one document at a time."""
