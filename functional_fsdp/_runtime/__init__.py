"""What the ranks of one mesh share: jobs on lanes, votes, and how ranks that parted meet again."""
