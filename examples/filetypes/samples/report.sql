-- Borrowers who are late, with the number of their books.
SELECT borrower.name, COUNT(*) AS late, MIN(loan.due) AS since
FROM loan
JOIN borrower ON borrower.id = loan.borrower_id
WHERE loan.returned IS NULL AND loan.due < CURRENT_DATE
GROUP BY borrower.name
HAVING COUNT(*) > 1
ORDER BY late DESC, since;
