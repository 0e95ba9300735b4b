"""What an application needs on the server: names, declarations, and the difference from what is there."""
