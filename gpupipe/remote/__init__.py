"""Objects in stores that are far away: asked for again when a request fails, and never taken for what they are not."""
