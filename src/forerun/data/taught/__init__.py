"""What a teacher said of every row, on disk: made once by `forerun cache`, read by every student."""
