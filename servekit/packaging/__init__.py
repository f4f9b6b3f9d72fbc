"""From a project to something that runs elsewhere: bundles, images, and what they are deployed to."""
